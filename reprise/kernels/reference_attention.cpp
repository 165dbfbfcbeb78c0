#include "reprise/kernels/reference.h"
