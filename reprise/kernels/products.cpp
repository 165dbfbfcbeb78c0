#include "reprise/kernels/products.h"
