// Attention over pages beside attention over a buffer of each sequence.
#pragma once

#include "bench/runner.h"

namespace reprise::bench {

// Decoding over several lengths and in an uneven batch, and chunks of a prompt.
void measure_paged_attention(Runner& runner, const Shapes& shapes);

}  // namespace reprise::bench
