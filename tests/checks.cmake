# SPDX-License-Identifier: Apache-2.0
# Tests of the project itself: the header, the symbols, the installation, the sources, the docs.

# evenkv_skip(NAME REASON): a test that shows as skipped, because something is missing here.
function(evenkv_skip name reason)
    add_test(NAME ${name} COMMAND sh -c "echo '${name}: skipped: ${reason}'; exit 77")
    set_tests_properties(${name} PROPERTIES SKIP_RETURN_CODE 77)
endfunction()

add_executable(test_header_c99 test_header_c99.c)
set_target_properties(test_header_c99 PROPERTIES C_STANDARD 99)
target_compile_options(test_header_c99 PRIVATE -Wall -Wextra -pedantic-errors -Werror)
target_link_libraries(test_header_c99 PRIVATE evenkv)
add_test(NAME test_header_c99 COMMAND test_header_c99)

include(CheckLanguage)
check_language(CXX)
if(CMAKE_CXX_COMPILER)
    enable_language(CXX)
    set(CMAKE_CXX_FLAGS "${CMAKE_C_FLAGS}") # a sanitizer has to be in the whole program
    add_executable(test_header_cxx test_header_cxx.cpp)
    set_target_properties(test_header_cxx PROPERTIES CXX_STANDARD 11 CXX_EXTENSIONS OFF)
    target_compile_options(test_header_cxx PRIVATE -Wall -Wextra -pedantic-errors -Werror)
    target_link_libraries(test_header_cxx PRIVATE evenkv)
    add_test(NAME test_header_cxx COMMAND test_header_cxx)
else()
    evenkv_skip(test_header_cxx "no C++ compiler")
endif()

add_test(NAME test_install
    COMMAND ${CMAKE_CURRENT_SOURCE_DIR}/install/test_install.sh ${CMAKE_BINARY_DIR} "${CMAKE_C_FLAGS}")

# evenkv_check(NAME [ARGUMENTS ...]): tests/check_NAME.py.
find_package(Python3 3.9 COMPONENTS Interpreter)
function(evenkv_check name)
    if(NOT Python3_FOUND)
        evenkv_skip(check_${name} "no python3")
        return()
    endif()
    add_test(NAME check_${name} COMMAND ${Python3_EXECUTABLE} ${CMAKE_CURRENT_SOURCE_DIR}/check_${name}.py ${ARGN})
    set_tests_properties(check_${name} PROPERTIES SKIP_RETURN_CODE 77)
endfunction()

evenkv_check(includes)
evenkv_check(style)
if(NOT CMAKE_C_FLAGS MATCHES "-fsanitize|--coverage") # their runtimes add symbols
    evenkv_check(symbols --shared $<TARGET_FILE:evenkv> --static $<TARGET_FILE:evenkv_static> --nm ${CMAKE_NM}
        --readelf ${CMAKE_READELF})
    if(TARGET evenkv_tool AND CMAKE_BUILD_TYPE STREQUAL RelWithDebInfo AND
        CMAKE_C_FLAGS_RELWITHDEBINFO MATCHES "-O3") # what the counts are of
        evenkv_check(instructions --evenkv $<TARGET_FILE:evenkv_tool>
            --compiler "${CMAKE_C_COMPILER_ID} ${CMAKE_C_COMPILER_VERSION}")
    endif()
    if(TARGET evenkv_tool)
        evenkv_check(docs --build ${CMAKE_BINARY_DIR} --cc ${CMAKE_C_COMPILER})
    endif()
endif()

# What runs on several threads; .ci/run repeats these under ThreadSanitizer.
set_tests_properties(test_base test_cpu_kernels test_decode test_decode_args test_decode_bits test_merge
    PROPERTIES LABELS threads)
