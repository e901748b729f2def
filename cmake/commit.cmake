# SPDX-License-Identifier: Apache-2.0
# The commit that a build is of, for the results that it measures.
# cmake -D SOURCE=DIR -D OUTPUT=commit.c [-D COMMIT=HASH] -P commit.cmake: defines bench_commit, and leaves a
# file alone that has the same.  COMMIT: for a tree without git.
if(NOT COMMIT)
    execute_process(COMMAND git describe --always --dirty --abbrev=12 --exclude=*
        WORKING_DIRECTORY ${SOURCE} OUTPUT_VARIABLE COMMIT OUTPUT_STRIP_TRAILING_WHITESPACE ERROR_QUIET)
endif()
if(NOT COMMIT)
    set(COMMIT unknown)
endif()
set(text "extern const char bench_commit[];\nconst char bench_commit[] = \"${COMMIT}\";\n")
if(EXISTS ${OUTPUT})
    file(READ ${OUTPUT} old)
endif()
if(NOT text STREQUAL old)
    file(WRITE ${OUTPUT} "${text}")
endif()
