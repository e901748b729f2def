/* SPDX-License-Identifier: Apache-2.0
 * The same program as C++: every declaration has C linkage and every _INIT is a C++ initialiser. */
#include "test_header_c99.c"
