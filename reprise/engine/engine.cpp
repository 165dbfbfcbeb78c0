#include "reprise/engine/engine.h"
