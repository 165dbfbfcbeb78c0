# What the Python module needs: a Python of 3.10 or newer, nanobind as a package of that Python, and, where MLX_DIR names
# no other, the MLX that is installed there. Python_EXECUTABLE chooses the Python.
find_package(Python 3.10 COMPONENTS Interpreter Development.Module)
if(NOT Python_FOUND)
  message(FATAL_ERROR "Python 3.10 or newer is needed, with its headers. Debian and Ubuntu: apt-get install python3-dev.")
endif()

# reprise_ask_python(VARIABLE what ARGS…): what `python ARGS…` prints.
function(reprise_ask_python variable what)
  execute_process(
    COMMAND "${Python_EXECUTABLE}" ${ARGN}
    RESULT_VARIABLE status OUTPUT_VARIABLE output ERROR_VARIABLE error OUTPUT_STRIP_TRAILING_WHITESPACE)
  if(status)
    message(FATAL_ERROR "${Python_EXECUTABLE} does not have ${what}: `${Python_EXECUTABLE} -m pip install ${what}`\n${error}")
  endif()
  set(${variable} "${output}" PARENT_SCOPE)
endfunction()

if(NOT nanobind_DIR)
  reprise_ask_python(nanobind_DIR "nanobind" -m nanobind --cmake_dir)
endif()
find_package(nanobind 3.1 REQUIRED CONFIG)

# The module runs beside the MLX of this Python, whatever MLX the headers are from.
reprise_ask_python(REPRISE_PYTHON_MLX "mlx" -m mlx --cmake-dir)
if(NOT MLX_DIR)
  set(MLX_DIR "${REPRISE_PYTHON_MLX}/share/cmake/MLX" CACHE PATH "The CMake package of MLX" FORCE)
endif()

# pip builds in a folder of its own, every time from nothing.
if(SKBUILD AND NOT CMAKE_CXX_COMPILER_LAUNCHER)
  find_program(REPRISE_CCACHE ccache)
  if(REPRISE_CCACHE)
    set(CMAKE_CXX_COMPILER_LAUNCHER "${REPRISE_CCACHE}")
  endif()
endif()
