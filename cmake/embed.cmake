# SPDX-License-Identifier: Apache-2.0
# ekv_embed(SYMBOL FILES...): the text files become `const ekv_embedded SYMBOL[]` (base/embedded.h) in the
# library, in the order given.  Written at build time, when a file has changed.
#
# This file is also the script that writes the table:
# cmake -D OUTPUT=table.c -D SYMBOL=name -D "FILES=a.txt;b.txt" -P embed.cmake

if(NOT CMAKE_SCRIPT_MODE_FILE)
    set(ekv_embed_script ${CMAKE_CURRENT_LIST_FILE})
    function(ekv_embed symbol)
        set(files ${ARGN})
        list(TRANSFORM files PREPEND ${CMAKE_CURRENT_SOURCE_DIR}/ REGEX "^[^/]")
        set(output ${CMAKE_CURRENT_BINARY_DIR}/${symbol}.c)
        add_custom_command(OUTPUT ${output} VERBATIM
            COMMAND ${CMAKE_COMMAND} -D OUTPUT=${output} -D SYMBOL=${symbol} -D "FILES=${files}"
                    -P ${ekv_embed_script}
            DEPENDS ${files} ${ekv_embed_script})
        # The library belongs to another folder, which sees this one's commands only through a target.
        add_custom_target(${symbol} DEPENDS ${output})
        add_dependencies(evenkv_objects ${symbol})
        target_sources(evenkv_objects PRIVATE ${output})
    endfunction()
    return()
endif()

set(table "")
foreach(file IN LISTS FILES)
    get_filename_component(name ${file} NAME_WE)
    file(READ ${file} text)
    string(REPLACE "\\" "\\\\" text "${text}")
    string(REPLACE "\"" "\\\"" text "${text}")
    string(REPLACE "\n" "\\n\"\n      \"" text "${text}")
    string(APPEND table "    { \"${name}\",\n      \"${text}\" },\n")
endforeach()
file(WRITE ${OUTPUT} "#include \"base/embedded.h\"\n
extern const ekv_embedded ${SYMBOL}[];
const ekv_embedded ${SYMBOL}[] = {\n${table}    { 0, 0 },\n};\n")
