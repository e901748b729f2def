# SPDX-License-Identifier: Apache-2.0
# ekv_fatbins(FILES...): compiles each .cu file with nvcc to an image for all of EVENKV_CUDA_ARCHS and embeds the
# images in the library (src/cuda/fatbin.h).  One image a file: kernels need no device linking, and a changed file
# does not recompile the others.  nvcc is called as a plain command, so that the project's only language is C.

set(EVENKV_CUDA_ARCHS "80-real;90a-real;80-virtual" CACHE STRING
    "GPU architectures: NN-real for machine code, NN-virtual for PTX")

find_program(EVENKV_NVCC nvcc HINTS ENV CUDA_HOME ENV CUDA_PATH PATHS /usr/local/cuda/bin PATH_SUFFIXES bin
    DOC "CUDA compiler; without it the library is built without CUDA")
if(EVENKV_NVCC)
    get_filename_component(ekv_nvcc_real ${EVENKV_NVCC} REALPATH)
    get_filename_component(ekv_cuda_root ${ekv_nvcc_real} DIRECTORY)
    find_path(EVENKV_CUDA_INCLUDE cuda.h
        HINTS ${ekv_cuda_root}/../include ${ekv_cuda_root}/../targets/x86_64-linux/include
        DOC "Folder of cuda.h")
endif()

function(ekv_fatbins)
    set(gencode "")
    foreach(arch IN LISTS EVENKV_CUDA_ARCHS)
        if(NOT arch MATCHES "^([0-9]+[af]?)-(real|virtual)$")
            message(FATAL_ERROR "EVENKV_CUDA_ARCHS: '${arch}' is not NN-real or NN-virtual")
        endif()
        if(CMAKE_MATCH_2 STREQUAL "real")
            list(APPEND gencode -gencode arch=compute_${CMAKE_MATCH_1},code=sm_${CMAKE_MATCH_1})
        else()
            list(APPEND gencode -gencode arch=compute_${CMAKE_MATCH_1},code=compute_${CMAKE_MATCH_1})
        endif()
    endforeach()

    set(images "")
    set(assembly "")
    set(declarations "")
    set(table "")
    foreach(source IN LISTS ARGN)
        get_filename_component(name ${source} NAME_WE)
        set(image ${CMAKE_CURRENT_BINARY_DIR}/${name}.fatbin)
        add_custom_command(OUTPUT ${image} VERBATIM
            COMMAND ${EVENKV_NVCC} --fatbin ${gencode} -std=c++17 -O3 -lineinfo --Werror all-warnings
                    -I${PROJECT_SOURCE_DIR}/src -I${PROJECT_SOURCE_DIR}/include
                    -MD -MF ${image}.d -MT ${image} -o ${image} ${CMAKE_CURRENT_SOURCE_DIR}/${source}
            DEPENDS ${source} DEPFILE ${image}.d
            COMMENT "Compiling kernels of ${source}")
        list(APPEND images ${image})
        # 16: cuLibraryLoadData wants the image aligned.  A C file with inline assembly, not an assembly file, so
        # that the C compiler marks the stack as not executable.
        string(APPEND assembly "        \".balign 16\\n.hidden ekv_fatbin_${name}\\n.globl ekv_fatbin_${name}\\n\"
        \"ekv_fatbin_${name}: .incbin \\\"${image}\\\"\\n\"\n")
        string(APPEND declarations "extern const char ekv_fatbin_${name}[] __attribute__((visibility(\"hidden\")));\n")
        string(APPEND table "    { \"${name}\", ekv_fatbin_${name} },\n")
    endforeach()

    set(embedded ${CMAKE_CURRENT_BINARY_DIR}/fatbins.c)
    file(CONFIGURE OUTPUT ${embedded} @ONLY CONTENT "#include \"cuda/fatbin.h\"

__asm__(\".pushsection .rodata, \\\"a\\\", @progbits\\n\"
@assembly@        \".popsection\\n\");

@declarations@
const ekv_fatbin ekv_fatbins[] = {
@table@    { 0, 0 },
};
")
    add_custom_target(ekv_fatbin_images DEPENDS ${images})
    add_dependencies(evenkv_objects ekv_fatbin_images)
    target_sources(evenkv_objects PRIVATE ${embedded})
    set_source_files_properties(${embedded} TARGET_DIRECTORY evenkv_objects PROPERTIES OBJECT_DEPENDS "${images}")
endfunction()
