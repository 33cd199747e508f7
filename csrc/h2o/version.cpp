#include "h2o/version.h"

namespace h2o {

const char* library_version() { return version(); }

}  // namespace h2o
