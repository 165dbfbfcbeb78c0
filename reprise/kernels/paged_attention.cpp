#include "reprise/kernels/paged_attention.h"
