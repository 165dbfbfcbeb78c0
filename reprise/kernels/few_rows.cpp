#include "reprise/kernels/few_rows.h"
