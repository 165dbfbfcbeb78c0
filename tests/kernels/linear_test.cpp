#include "reprise/kernels/linear.h"

#include <gtest/gtest.h>
