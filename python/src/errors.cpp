// Our errors as the exceptions of reprise.errors, each also the builtin exception that callers of mlx-lm expect.
#include "python/src/bindings.h"

#include "reprise/base/error.h"

namespace nb = nanobind;

namespace reprise::python {

namespace {

const char* exception_name(ErrorCode code) {
  switch (code) {
    case ErrorCode::invalid_argument:
      return "InvalidArgumentError";
    case ErrorCode::failed_precondition:
      return "FailedPreconditionError";
    case ErrorCode::not_found:
      return "NotFoundError";
    case ErrorCode::unsupported:
      return "UnsupportedError";
    case ErrorCode::corrupt_data:
      return "CorruptDataError";
    case ErrorCode::resource_exhausted:
      return "ResourceExhaustedError";
    case ErrorCode::cancelled:
      return "CancelledError";
    case ErrorCode::internal:
      break;
  }
  return "InternalError";
}

}  // namespace

void bind_errors(nb::module_&) {
  nb::register_exception_translator([](const std::exception_ptr& exception, void*) {
    try {
      std::rethrow_exception(exception);
    } catch (const Error& error) {
      const nb::object type = nb::module_::import_("reprise.errors").attr(exception_name(error.code()));
      PyErr_SetString(type.ptr(), error.what());
    }
  });
}

}  // namespace reprise::python
