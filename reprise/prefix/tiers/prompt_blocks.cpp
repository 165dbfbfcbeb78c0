#include "reprise/prefix/tiers/prompt_blocks.h"
