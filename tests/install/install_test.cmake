# Installs the build, moves the prefix, and lets a foreign project find, build and run against it.
# cmake -DBUILD_DIR=… -DSOURCE_DIR=… -DMLX_DIR=… -DWORK_DIR=… -DGENERATOR=… -DCXX=… -P install_test.cmake
cmake_minimum_required(VERSION 3.25)

function(run)
  execute_process(COMMAND ${ARGN} RESULT_VARIABLE status OUTPUT_VARIABLE output ERROR_VARIABLE output)
  if(status)
    list(JOIN ARGN " " line)
    message(FATAL_ERROR "${line}\nended with ${status}:\n${output}")
  endif()
  set(output "${output}" PARENT_SCOPE)
endfunction()

file(REMOVE_RECURSE "${WORK_DIR}")
run("${CMAKE_COMMAND}" --install "${BUILD_DIR}" --prefix "${WORK_DIR}/first")
file(RENAME "${WORK_DIR}/first" "${WORK_DIR}/moved")
set(prefix "${WORK_DIR}/moved")

# No public header shows what only our own files need, and nothing installed remembers where it was built.
file(GLOB_RECURSE headers "${prefix}/include/*")
list(LENGTH headers number)
if(number LESS 5)
  message(FATAL_ERROR "only ${number} headers were installed")
endif()
foreach(header IN LISTS headers)
  file(STRINGS "${header}" lines REGEX "#[ \t]*include.*(nlohmann|boost/|CLI/|textkit|sqlite|hiredis|openssl|hwy/)")
  if(lines)
    message(FATAL_ERROR "${header} includes: ${lines}")
  endif()
endforeach()
file(GLOB_RECURSE package_files "${prefix}/*.cmake")
foreach(file IN LISTS package_files)
  file(READ "${file}" text)
  string(FIND "${text}" "${SOURCE_DIR}" at)
  if(NOT at EQUAL -1)
    message(FATAL_ERROR "${file} names the source folder")
  endif()
endforeach()

run("${CMAKE_COMMAND}" -G "${GENERATOR}" -S "${CMAKE_CURRENT_LIST_DIR}/consumer" -B "${WORK_DIR}/build"
  "-DCMAKE_PREFIX_PATH=${prefix}" "-DMLX_DIR=${MLX_DIR}" "-DCMAKE_CXX_COMPILER=${CXX}" -DCMAKE_BUILD_TYPE=Release)
run("${CMAKE_COMMAND}" --build "${WORK_DIR}/build")
foreach(program IN ITEMS caches everything)
  run("${WORK_DIR}/build/${program}")
  message(STATUS "${program}: ${output}")
  if(NOT APPLE AND NOT output MATCHES "blas [^\n]*libopenblas")
    message(FATAL_ERROR "${program} takes BLAS from elsewhere: ${output}")
  endif()
endforeach()

# The moved program stands alone.
if(EXISTS "${prefix}/bin/reprise")
  run("${prefix}/bin/reprise" --version)
  message(STATUS "${output}")
endif()

# The same repository as a part of another project, which has asked for neither tests nor programs.
run("${CMAKE_COMMAND}" -G "${GENERATOR}" -S "${CMAKE_CURRENT_LIST_DIR}/consumer" -B "${WORK_DIR}/from_source"
  "-DREPRISE_SOURCE=${SOURCE_DIR}" "-DMLX_DIR=${MLX_DIR}" "-DCMAKE_CXX_COMPILER=${CXX}")
run("${CMAKE_COMMAND}" --build "${WORK_DIR}/from_source" --target from_source)
run("${WORK_DIR}/from_source/from_source")
if(NOT output STREQUAL "not_found 2\n")
  message(FATAL_ERROR "from_source printed ${output}")
endif()
file(REMOVE_RECURSE "${WORK_DIR}")
