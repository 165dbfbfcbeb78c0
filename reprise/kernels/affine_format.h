// Which affine formats the products take: MLX's, and groups of 16, which MLX does not have and GGUF's Q2_K, Q3_K and
// Q6_K do: one matrix [out, in], of any bits but 4, its inputs a multiple of 32. Threads: a free function.
#pragma once

namespace reprise {

// Of a weight of `in` inputs. Groups of 16 are for one matrix, not for several.
bool is_affine_format(int bits, int group_size, int in);

}  // namespace reprise
