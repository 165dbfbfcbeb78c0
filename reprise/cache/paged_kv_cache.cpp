#include "reprise/cache/paged_kv_cache.h"
