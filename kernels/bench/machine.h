/* SPDX-License-Identifier: MIT OR Apache-2.0 */
/* What the run was made on, from the driver's and the kernel's files. Plain C++. */
#ifndef IBGDA_BENCH_MACHINE_H
#define IBGDA_BENCH_MACHINE_H

#include <cstdio>
#include <cstdlib>
#include <ctime>
#include <fstream>
#include <sched.h>
#include <string>

namespace bench {

/* First line of a file, or "unknown". */
inline std::string line_in(const std::string &path)
{
	std::ifstream file(path);
	std::string line;
	return std::getline(file, line) && !line.empty() ? line : "unknown";
}

inline std::string driver_version()
{
	std::string version = line_in("/sys/module/nvidia/version");
	return version != "unknown" ? version : line_in("/proc/driver/nvidia/version");
}

inline std::string date_utc()
{
	char text[32];
	time_t now = std::time(nullptr);
	tm parts;
	gmtime_r(&now, &parts);
	std::strftime(text, sizeof text, "%Y-%m-%d %H:%M UTC", &parts);
	return text;
}

/* CPUs of a list such as "0-15,32-47" that this process may run on. */
inline cpu_set_t allowed_of(const std::string &list, const cpu_set_t &allowed)
{
	cpu_set_t set;
	CPU_ZERO(&set);
	const char *at = list.c_str();
	while (*at >= '0' && *at <= '9') {
		char *end;
		long from = std::strtol(at, &end, 10), to = from;
		if (*end == '-')
			to = std::strtol(end + 1, &end, 10);
		for (long cpu = from; cpu <= to && cpu < CPU_SETSIZE; cpu++)
			if (CPU_ISSET((size_t)cpu, &allowed))
				CPU_SET((size_t)cpu, &set);
		at = *end == ',' ? end + 1 : end;
	}
	return set;
}

/* Onto the CPUs next to the GPU, so that host memory is taken there too; says what it did. */
inline std::string move_next_to(const std::string &bus_id)
{
	std::string list = line_in("/sys/bus/pci/devices/" + bus_id + "/local_cpulist");
	cpu_set_t allowed, near;
	if (list == "unknown" || sched_getaffinity(0, sizeof allowed, &allowed))
		return "wherever the scheduler puts it";
	near = allowed_of(list, allowed);
	if (!CPU_COUNT(&near) || sched_setaffinity(0, sizeof near, &near))
		return "not next to the GPU (" + list + ")";
	return "next to the GPU (" + list + ")";
}

} // namespace bench

#endif
