// The Verilated engine of sim/engine_sim.cpp whose queues tell what they held. See sim/queues.py.

#include "engine_sim.cpp"

#include <string>

namespace {
std::string told;
}

extern "C" {

// Called by sim/models/queue_mark.v when an engine is freed; a line for each queue.
void queue_mark(const char *place, int depth, int most, long long full, long long refused) {
    told += std::string(place) + ' ' + std::to_string(depth) + ' ' + std::to_string(most) + ' ' +
            std::to_string(full) + ' ' + std::to_string(refused) + '\n';
}

// What the engines freed so far have told, and forget it.
const char *queue_marks() {
    static std::string text;
    text.swap(told);
    told.clear();
    return text.c_str();
}
}
