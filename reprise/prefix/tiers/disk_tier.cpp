#include "reprise/prefix/tiers/disk_tier.h"
