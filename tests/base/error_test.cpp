#include "reprise/base/error.h"

#include <gtest/gtest.h>

#include <set>

namespace reprise {
namespace {

TEST(Error, KeepsItsCodeAndTextWhenCaughtAsAnException) {
  try {
    throw Error(ErrorCode::corrupt_data, "[read] 8 bytes, but got <3>");
  } catch (const std::exception& error) {
    EXPECT_STREQ(error.what(), "[read] 8 bytes, but got <3>");
    EXPECT_EQ(dynamic_cast<const Error&>(error).code(), ErrorCode::corrupt_data);
  }
}

TEST(Error, EveryCodeHasANameOfItsOwn) {
  std::set<std::string_view> names;
  const ErrorCode codes[] = {
      ErrorCode::invalid_argument, ErrorCode::failed_precondition, ErrorCode::not_found, ErrorCode::unsupported,
      ErrorCode::corrupt_data,     ErrorCode::resource_exhausted,  ErrorCode::cancelled, ErrorCode::internal};
  for (const ErrorCode code : codes) names.insert(to_string(code));
  EXPECT_EQ(names.size(), std::size(codes));
  EXPECT_EQ(to_string(ErrorCode::not_found), "not_found");
}

}  // namespace
}  // namespace reprise
