#include "reprise/cache/paged_batch.h"
