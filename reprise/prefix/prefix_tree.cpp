#include "reprise/prefix/prefix_tree.h"
