#include "reprise/engine/scheduler.h"
