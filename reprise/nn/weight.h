// How weight matrices are stored, which the kernels under nn share.
#pragma once

#include "reprise/kernels/affine_format.h"  // IWYU pragma: export
#include "reprise/kernels/weight.h"         // IWYU pragma: export
