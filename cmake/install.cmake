# SPDX-License-Identifier: Apache-2.0
# What `cmake --install` puts where: library, header, tool, CMake package, pkg-config file.
include(CMakePackageConfigHelpers)

install(TARGETS evenkv EXPORT evenkv-targets LIBRARY DESTINATION ${CMAKE_INSTALL_LIBDIR})
install(DIRECTORY include/evenkv DESTINATION ${CMAKE_INSTALL_INCLUDEDIR})
if(TARGET evenkv_tool)
    install(TARGETS evenkv_tool RUNTIME DESTINATION ${CMAKE_INSTALL_BINDIR})
endif()

set(package_dir ${CMAKE_INSTALL_LIBDIR}/cmake/evenkv)
install(EXPORT evenkv-targets NAMESPACE evenkv:: DESTINATION ${package_dir})
configure_package_config_file(cmake/evenkv-config.cmake.in ${CMAKE_BINARY_DIR}/evenkv-config.cmake
    INSTALL_DESTINATION ${package_dir})
# Before 1.0 a minor version may change the interface.
write_basic_package_version_file(${CMAKE_BINARY_DIR}/evenkv-config-version.cmake COMPATIBILITY SameMinorVersion)
install(FILES ${CMAKE_BINARY_DIR}/evenkv-config.cmake ${CMAKE_BINARY_DIR}/evenkv-config-version.cmake
    DESTINATION ${package_dir})

# pkg-config finds the prefix from where the file lies, so that the prefix of the installation need not be known
# at configuration.  An absolute library folder (as some distributions set) stands as it is.
if(IS_ABSOLUTE ${CMAKE_INSTALL_LIBDIR})
    set(PC_PREFIX ${CMAKE_INSTALL_PREFIX})
    set(PC_LIBDIR ${CMAKE_INSTALL_LIBDIR})
else()
    file(RELATIVE_PATH up /prefix/${CMAKE_INSTALL_LIBDIR}/pkgconfig /prefix)
    string(REGEX REPLACE "/$" "" up ${up})
    set(PC_PREFIX "\${pcfiledir}/${up}")
    set(PC_LIBDIR "\${prefix}/${CMAKE_INSTALL_LIBDIR}")
endif()
if(IS_ABSOLUTE ${CMAKE_INSTALL_INCLUDEDIR})
    set(PC_INCLUDEDIR ${CMAKE_INSTALL_INCLUDEDIR})
else()
    set(PC_INCLUDEDIR "\${prefix}/${CMAKE_INSTALL_INCLUDEDIR}")
endif()
configure_file(cmake/evenkv.pc.in ${CMAKE_BINARY_DIR}/evenkv.pc @ONLY)
install(FILES ${CMAKE_BINARY_DIR}/evenkv.pc DESTINATION ${CMAKE_INSTALL_LIBDIR}/pkgconfig)
