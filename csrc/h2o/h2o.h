#pragma once

// The whole C++ API of libh2o.
#include "h2o/budget.h"
#include "h2o/config.h"
#include "h2o/eviction_policy.h"
#include "h2o/kv_cache.h"
#include "h2o/ops/attention_decode.h"
#include "h2o/ops/evict.h"
#include "h2o/ops/prefill_select.h"
#include "h2o/ops/rotate.h"
#include "h2o/version.h"
