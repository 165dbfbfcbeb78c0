# Installs ./python by pip into a fresh virtual environment, without network and without isolation: what it is built with
# comes from the environment of PYTHON. Then runs pip_check.py there, away from the checkout.
# cmake -DPYTHON=… -DSOURCE_DIR=… -DWORK_DIR=… -DCXX=… -P pip_test.cmake
cmake_minimum_required(VERSION 3.25)

function(run)
  execute_process(COMMAND ${ARGN}
    WORKING_DIRECTORY "${WORK_DIR}" RESULT_VARIABLE status OUTPUT_VARIABLE output ERROR_VARIABLE output)
  if(status)
    list(JOIN ARGN " " line)
    message(FATAL_ERROR "${line}\nended with ${status}:\n${output}")
  endif()
  string(STRIP "${output}" output)
  set(output "${output}" PARENT_SCOPE)
endfunction()

set(packages [[print(__import__("sysconfig").get_path("purelib"))]])

# The build folder stays, so that only the first run compiles everything.
file(MAKE_DIRECTORY "${WORK_DIR}")
file(REMOVE_RECURSE "${WORK_DIR}/venv")
run("${PYTHON}" -c "${packages}")
set(source_packages "${output}")
run("${PYTHON}" -m venv --without-pip "${WORK_DIR}/venv")
set(fresh_python "${WORK_DIR}/venv/bin/python")
run("${fresh_python}" -c "${packages}")
set(fresh_packages "${output}")

# MLX is there; nothing else is.
file(GLOB mlx LIST_DIRECTORIES true
  "${source_packages}/mlx" "${source_packages}/mlx-*.dist-info" "${source_packages}/mlx_*.libs")
foreach(folder IN LISTS mlx)
  cmake_path(GET folder FILENAME name)
  file(CREATE_LINK "${folder}" "${fresh_packages}/${name}" SYMBOLIC)
endforeach()

run("${CMAKE_COMMAND}" -E env "PYTHONPATH=${source_packages}" "CXX=${CXX}"
  "${fresh_python}" -m pip install --disable-pip-version-check --no-index --no-build-isolation
  "--config-settings=build-dir=${WORK_DIR}/build" "${SOURCE_DIR}/python")
run("${fresh_python}" -I "${CMAKE_CURRENT_LIST_DIR}/pip_check.py" "${SOURCE_DIR}")
