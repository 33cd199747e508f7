#pragma once

// The one include of Catch2: version 3 splits its headers, Debian's 2.13 has a single one.
#if __has_include(<catch2/catch_all.hpp>)
#include <catch2/catch_all.hpp>
using Catch::Approx;  // as in version 2
#else
#include <catch2/catch.hpp>
#endif
