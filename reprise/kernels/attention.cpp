#include "reprise/kernels/attention.h"
