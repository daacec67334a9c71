// The Verilated engine of sim/engine_sim.cpp whose streams tell every cycle of theirs. See sim/trace.py.

#include "engine_sim.cpp"

namespace {
constexpr int POINTS = 16;
std::vector<uint8_t> states[POINTS];   // of every cycle: bit 0 valid, bit 1 ready
std::vector<uint32_t> values[POINTS];  // of every transfer
}  // namespace

extern "C" {

// Called by sim/models/trace_point.v at every clock edge.
void trace_point(int point, svBit valid, svBit ready, int value) {
    states[point].push_back((valid & 1) | (ready & 1) << 1);
    if (valid & ready & 1) values[point].push_back(value);
}

void trace_clear() {
    for (auto &each : states) each.clear();
    for (auto &each : values) each.clear();
}

size_t trace_cycles(int point) { return states[point].size(); }
const uint8_t *trace_states(int point) { return states[point].data(); }
size_t trace_transfers(int point) { return values[point].size(); }
const uint32_t *trace_values(int point) { return values[point].data(); }
}
