# SPDX-License-Identifier: Apache-2.0
# The commit that a build is of, for the results that it measures.
# cmake -D SOURCE=DIR -D OUTPUT=commit.h [-D COMMIT=HASH] -P commit.cmake: writes EVENKV_COMMIT to the header, if it is
# another one than it has.  COMMIT: for a tree without git.
if(NOT COMMIT)
    execute_process(COMMAND git describe --always --dirty --abbrev=12 --exclude=*
        WORKING_DIRECTORY ${SOURCE} OUTPUT_VARIABLE COMMIT OUTPUT_STRIP_TRAILING_WHITESPACE ERROR_QUIET)
endif()
if(NOT COMMIT)
    set(COMMIT unknown)
endif()
set(text "#define EVENKV_COMMIT \"${COMMIT}\"\n")
if(EXISTS ${OUTPUT})
    file(READ ${OUTPUT} old)
endif()
if(NOT text STREQUAL old)
    file(WRITE ${OUTPUT} "${text}")
endif()
