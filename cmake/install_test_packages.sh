#!/bin/sh
# Installs with apt-get, where this user may, what the C++ tests need: Catch2, without which CMake says what to do; a
# compiler for aarch64 and pkg-config, without each of which one test is left out; and clang, without which the fuzzers
# replay their corpus.
command -v apt-get >/dev/null && command -v dpkg >/dev/null || exit 0
missing=
for package in catch2 g++-aarch64-linux-gnu pkg-config clang libclang-rt-dev; do
  dpkg -s $package >/dev/null 2>&1 || missing="$missing $package"
done
[ -n "$missing" ] || exit 0
if [ "$(id -u)" = 0 ]; then
  apt-get update -qq && apt-get install -y -qq --no-install-recommends $missing >/dev/null
else
  echo "For all C++ tests: sudo apt-get install$missing" >&2
fi
exit 0
