#include "reprise/engine/model_runner.h"
