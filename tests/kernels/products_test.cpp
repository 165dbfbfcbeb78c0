#include "reprise/kernels/products.h"

#include <gtest/gtest.h>
