# cmake -DPROGRAM=… -DSOURCE_DIR=… -DPART=K/N -P run_models.cmake: a program over the full kit where it is, else over the
# committed subset.
set(folder "${SOURCE_DIR}/tests/data/models")
foreach(candidate "$ENV{REPRISE_TEST_DATA}/models" "${SOURCE_DIR}/../shared/models")
  if(IS_DIRECTORY "${candidate}")
    set(folder "${candidate}")
    break()
  endif()
endforeach()
message(STATUS "models: ${folder}")
execute_process(COMMAND "${PROGRAM}" "${folder}" --part "${PART}" COMMAND_ERROR_IS_FATAL ANY)
