# Target reprise::mlx: MLX together with a fast BLAS. Whatever uses MLX links this and never `mlx` alone.
#
# The MLX wheel for Linux carries a reference BLAS. The dynamic linker resolves libmlx's cblas calls to the first library,
# in load order, that has them, so OpenBLAS as a *direct* dependency of the executable comes before it. Debian's linker runs
# with --as-needed, which would drop a library that the executable itself does not call: hence the push-state.
# A module that a foreign process loads cannot change that order, and does not get what would be of no use to it.
# Used by the build and by the installed package.
if(NOT TARGET reprise_openblas)
  add_library(reprise_openblas INTERFACE IMPORTED GLOBAL)
  if(NOT APPLE AND NOT REPRISE_CACHE_ONLY)
    find_library(REPRISE_OPENBLAS_LIBRARY NAMES openblas REQUIRED)
    set(_reprise_openblas_link "--no-as-needed,${REPRISE_OPENBLAS_LIBRARY}")
    get_filename_component(_reprise_openblas_dir "${REPRISE_OPENBLAS_LIBRARY}" DIRECTORY)
    if(NOT _reprise_openblas_dir IN_LIST CMAKE_CXX_IMPLICIT_LINK_DIRECTORIES)
      string(PREPEND _reprise_openblas_link "-rpath,${_reprise_openblas_dir},")
    endif()
    # One option, so that CMake's de-duplication cannot take it apart.
    set_target_properties(reprise_openblas PROPERTIES
      INTERFACE_LINK_OPTIONS
        "$<$<NOT:$<STREQUAL:$<TARGET_PROPERTY:TYPE>,MODULE_LIBRARY>>:LINKER:--push-state,${_reprise_openblas_link},--pop-state>")
    unset(_reprise_openblas_dir)
    unset(_reprise_openblas_link)
  endif()
endif()
