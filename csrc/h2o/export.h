#pragma once

// Marks what libh2o exports; the library is built with hidden visibility, so that nothing else
// leaks out of it (its JSON parser among other things).
#define H2O_API __attribute__((visibility("default")))
