// Links reprise::reprise: a model that is not there is an error with a code, and BLAS is OpenBLAS here too.
#include <iostream>

#include "blas.h"
#include "reprise/base/error.h"
#include "reprise/generate/loaded_model.h"

int main() {
  try {
    reprise::load("no-such-model.gguf");
  } catch (const reprise::Error& error) {
    std::cout << "blas " << blas_library() << "\n";
    return error.code() == reprise::ErrorCode::not_found ? 0 : 1;
  }
  return 1;
}
