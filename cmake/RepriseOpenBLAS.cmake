# Target reprise_openblas: makes OpenBLAS a *direct* dependency of whatever links it, ahead of the reference BLAS inside the
# MLX wheel: the dynamic linker resolves libmlx's cblas calls to the first library in load order that has them. Debian's
# linker runs with --as-needed, which would drop a library whose symbols the executable itself does not call.
# Included by the build and by the installed package.
if(NOT TARGET reprise_openblas)
  add_library(reprise_openblas INTERFACE IMPORTED GLOBAL)
  if(NOT APPLE)
    find_library(REPRISE_OPENBLAS_LIBRARY NAMES openblas REQUIRED)
    set_target_properties(reprise_openblas PROPERTIES
      INTERFACE_LINK_OPTIONS
        "LINKER:--push-state,--no-as-needed;${REPRISE_OPENBLAS_LIBRARY};LINKER:--pop-state")
  endif()
endif()
