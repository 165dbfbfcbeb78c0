#include "reprise/kernels/many_rows.h"
