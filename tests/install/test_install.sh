#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# test_install.sh BUILD_DIR C_FLAGS: installs what BUILD_DIR built, then builds and runs consumer.c against it
# through find_package and through pkg-config.  C_FLAGS: those of the build (a sanitizer has to be linked too).
set -eu

build=$1
flags=$2
here=$(cd "$(dirname "$0")" && pwd)
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT

say() {
    echo "test_install: $*"
}

run() { # command; its output only if it fails
    "$@" >"$scratch/log" 2>&1 || {
        cat "$scratch/log"
        say "failed: $*"
        exit 1
    }
}

# Installed under DESTDIR and moved from there: nothing may depend on where the prefix was.
run env DESTDIR="$scratch/stage" cmake --install "$build" --prefix /opt/evenkv
mv "$scratch/stage/opt/evenkv" "$scratch/prefix"
prefix=$scratch/prefix
lib=$(dirname "$(find "$prefix" -name libevenkv.so)")
version=$(sed -n 's/^Version: //p' "$lib/pkgconfig/evenkv.pc")

check_run() { # program
    output=$(LD_LIBRARY_PATH=$lib "$1")
    [ "$output" = "evenkv $version" ] || { say "printed '$output', not 'evenkv $version'"; exit 1; }
}

run cmake -S "$here" -B "$scratch/cmake" -DCMAKE_PREFIX_PATH="$prefix" -DCMAKE_C_FLAGS="$flags"
run cmake --build "$scratch/cmake"
check_run "$scratch/cmake/consumer"
say "find_package works"

PKG_CONFIG_PATH=$lib/pkgconfig
export PKG_CONFIG_PATH
# shellcheck disable=SC2046,SC2086 # lists of flags
${CC:-cc} -std=c99 -Wall -Werror $flags -o "$scratch/consumer" "$here/consumer.c" $(pkg-config --cflags --libs evenkv)
check_run "$scratch/consumer"
say "pkg-config works"

[ ! -x "$prefix/bin/evenkv" ] || "$prefix/bin/evenkv" --version >/dev/null
if [ -n "$(find "$prefix" \( -name '*.cmake' -o -name '*.pc' \) -exec grep -l -e "$build" -e /opt/evenkv {} +)" ]; then
    say "an installed file names the folder of the build or of the first prefix"
    exit 1
fi
