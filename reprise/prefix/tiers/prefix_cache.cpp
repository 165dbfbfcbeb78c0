#include "reprise/prefix/tiers/prefix_cache.h"
