#include "reprise/cache/page_pool.h"
