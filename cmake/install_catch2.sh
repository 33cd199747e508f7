#!/bin/sh
# Installs Catch2 with apt-get where it is missing and this user may; elsewhere CMake looks for one and says what to do.
if command -v apt-get >/dev/null && command -v dpkg >/dev/null && ! dpkg -s catch2 >/dev/null 2>&1; then
  if [ "$(id -u)" = 0 ]; then
    apt-get update -qq && apt-get install -y -qq catch2 >/dev/null
  else
    echo "The C++ tests need Catch2: sudo apt-get install catch2" >&2
  fi
fi
exit 0
