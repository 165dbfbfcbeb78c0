# What `cmake --install` puts into the prefix: the rooms with their public headers, libtextkit, the program, a CMake package
# `reprise`, and (REPRISE_INSTALL_MLX) a copy of the MLX wheel, so that the whole prefix can be moved and stands alone.
include(CMakePackageConfigHelpers)
include(GNUInstallDirs)

set(_package_dir "${CMAKE_INSTALL_LIBDIR}/cmake/reprise")

get_property(_rooms GLOBAL PROPERTY REPRISE_ROOMS)
install(TARGETS ${_rooms} reprise_mlx reprise_reprise
  EXPORT repriseTargets
  ARCHIVE DESTINATION "${CMAKE_INSTALL_LIBDIR}"
  FILE_SET HEADERS DESTINATION "${CMAKE_INSTALL_INCLUDEDIR}")
install(EXPORT repriseTargets NAMESPACE reprise:: DESTINATION "${_package_dir}")

install(FILES $<TARGET_FILE:reprise_textkit> DESTINATION "${CMAKE_INSTALL_LIBDIR}")
if(TARGET reprise_program)
  install(TARGETS reprise_program RUNTIME DESTINATION "${CMAKE_INSTALL_BINDIR}")
endif()

# libmlx finds its helpers at $ORIGIN/../../mlx_cpu.libs: the copy keeps the wheel's layout.
if(REPRISE_INSTALL_MLX)
  install(DIRECTORY "${REPRISE_MLX_ROOT}" DESTINATION "${REPRISE_INSTALL_MLX_DIR}")
  foreach(_libs IN LISTS REPRISE_MLX_HELPERS)
    install(DIRECTORY "${_libs}" DESTINATION "${REPRISE_INSTALL_MLX_DIR}")
  endforeach()
  foreach(_info IN LISTS REPRISE_MLX_DIST_INFO)
    install(DIRECTORY "${_info}/licenses" DESTINATION "${CMAKE_INSTALL_DOCDIR}/mlx" OPTIONAL)
  endforeach()
endif()

set(REPRISE_TEXTKIT_FILE "${CMAKE_SHARED_LIBRARY_PREFIX}textkit${CMAKE_SHARED_LIBRARY_SUFFIX}")
configure_package_config_file(
  "${CMAKE_CURRENT_LIST_DIR}/repriseConfig.cmake.in" "${PROJECT_BINARY_DIR}/cmake/repriseConfig.cmake"
  INSTALL_DESTINATION "${_package_dir}"
  PATH_VARS CMAKE_INSTALL_LIBDIR REPRISE_INSTALL_MLX_DIR
  NO_SET_AND_CHECK_MACRO)
write_basic_package_version_file(
  "${PROJECT_BINARY_DIR}/cmake/repriseConfigVersion.cmake" COMPATIBILITY SameMinorVersion)
install(
  FILES
    "${PROJECT_BINARY_DIR}/cmake/repriseConfig.cmake"
    "${PROJECT_BINARY_DIR}/cmake/repriseConfigVersion.cmake"
    "${CMAKE_CURRENT_LIST_DIR}/RepriseMLX.cmake"
  DESTINATION "${_package_dir}")
install(
  FILES "${PROJECT_SOURCE_DIR}/LICENSE" "${PROJECT_SOURCE_DIR}/THIRD_PARTY_NOTICES.md"
  DESTINATION "${CMAKE_INSTALL_DOCDIR}")
