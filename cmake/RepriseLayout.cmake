# Where installed programs look for libmlx and libtextkit: relative to themselves, so that the prefix can be moved.
include(GNUInstallDirs)

set(REPRISE_INSTALL_MLX_DIR "${CMAKE_INSTALL_LIBDIR}/reprise")

# A wheel is mlx/{include,lib,share} beside a folder of helper libraries, or (Metal) mlx/ alone.
get_filename_component(REPRISE_MLX_ROOT "${MLX_DIR}/../../.." ABSOLUTE)
get_filename_component(_mlx_parent "${REPRISE_MLX_ROOT}" DIRECTORY)
file(GLOB REPRISE_MLX_HELPERS LIST_DIRECTORIES true "${_mlx_parent}/mlx_*.libs")
file(GLOB REPRISE_MLX_DIST_INFO LIST_DIRECTORIES true "${_mlx_parent}/mlx_*.dist-info")
if(REPRISE_MLX_DIST_INFO)
  set(_mlx_is_wheel ON)
else()
  set(_mlx_is_wheel OFF)
endif()
option(REPRISE_INSTALL_MLX "Copy the MLX wheel into the installation" ${_mlx_is_wheel})

if(APPLE)
  set(_origin "@loader_path")
else()
  set(_origin "$ORIGIN")
endif()
set(CMAKE_INSTALL_RPATH "${_origin}/../${CMAKE_INSTALL_LIBDIR}")
if(REPRISE_INSTALL_MLX)
  list(APPEND CMAKE_INSTALL_RPATH "${_origin}/../${REPRISE_INSTALL_MLX_DIR}/mlx/lib")
else()
  list(APPEND CMAKE_INSTALL_RPATH "${REPRISE_MLX_ROOT}/lib")
endif()
