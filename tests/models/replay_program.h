// What programs over folders of kit models share: arguments, which folders, what is told, exit status.
#pragma once

#include <filesystem>
#include <functional>
#include <string>
#include <vector>

#include "tests/models/kit_checks.h"

namespace reprise::test {

// Checks one folder; each outcome is told, with the folder's name. Throws: what makes the whole folder fail.
using CheckFolder = std::function<void(const std::filesystem::path& folder, const ReportOutcome& report)>;

// PROGRAM DIR [--only NAME…] [--part K/N] [--known] [--verbose]. The last line of its output counts what passed, failed
// and was skipped. Returns: 0 all passed, 1 something failed, 2 nothing could be run as asked.
int replay_folders(const std::string& program, const std::vector<std::string>& words, const CheckFolder& check);

}  // namespace reprise::test
