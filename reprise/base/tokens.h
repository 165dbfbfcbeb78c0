// Token ids as every room passes them.
#pragma once

#include <cstdint>
#include <vector>

namespace reprise {

using TokenId = std::int32_t;
using Tokens = std::vector<TokenId>;

}  // namespace reprise
