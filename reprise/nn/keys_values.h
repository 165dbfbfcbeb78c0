// The vocabulary of attention, which the kernels under it share.
#pragma once

#include "reprise/kernels/keys_values.h"  // IWYU pragma: export
