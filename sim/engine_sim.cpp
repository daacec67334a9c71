// The Verilated expert engine behind a C interface, so that a clock cycle costs no Python. See sim/engine_sim.py.
//
// A store answers the engine's requests: each answer's first beat comes `latency` cycles after its request at the
// earliest, and beats come at most at `rate` bytes a cycle. Beyond that, either side may stall at random.

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <deque>
#include <vector>

#include "Vengine.h"
#include "verilated.h"

// Verilator writes two underscores in a port's name as one and this.
#define PORT(stream, part) stream##___05F##part

namespace {

// A port's bits, whatever type its width gives it: from and to bytes, least significant first.
template <typename T>
void set_bytes(T &port, const uint8_t *bytes, size_t count) {
    std::memcpy(&port, bytes, count);
}
template <typename T>
void get_bytes(const T &port, uint8_t *bytes, size_t count) {
    std::memcpy(bytes, &port, count);
}

constexpr size_t LINK = LINK_BYTES;

struct Beat {
    uint8_t bytes[LINK + 1];  // data, then the bit that marks the message's last
};

struct Message {
    std::vector<uint8_t> bytes;
    uint64_t ready_at;
};

enum Status { OUT_OF_CYCLES = 0, REQUEST = 1, RECEIVED = 2, PROTOCOL = 3 };

struct Sim {
    VerilatedContext context;
    Vengine top{&context};
    uint64_t cycle = 0;
    uint64_t latency = 0, cycles_per_256_beats = 256, next_beat_256 = 0;
    uint32_t p_in = UINT32_MAX, p_out = UINT32_MAX;
    uint64_t random_state = 1;
    std::deque<Message> sending;
    size_t sent = 0;  // bytes of the first
    bool offering = false;
    std::deque<uint64_t> answers_due;  // of each request unanswered, the earliest cycle of its answer
    std::vector<uint64_t> requests;   // offset and length, by turns
    size_t requests_given = 0;
    std::vector<uint8_t> receiving;
    std::deque<std::vector<uint8_t>> received;
    bool waited = false;
    Beat waiting;

    bool chance(uint32_t p) {
        if (p == UINT32_MAX) return true;
        random_state ^= random_state << 13;
        random_state ^= random_state >> 7;
        random_state ^= random_state << 17;
        return static_cast<uint32_t>(random_state >> 32) < p;
    }

    void offer() {
        if (offering || sending.empty()) return;
        const Message &message = sending.front();
        if (cycle < message.ready_at || cycle * 256 < next_beat_256 || !chance(p_in)) return;
        Beat beat{};
        size_t count = std::min(LINK, message.bytes.size() - sent);
        std::memcpy(beat.bytes, message.bytes.data() + sent, count);
        beat.bytes[LINK] = sent + count == message.bytes.size();
        set_bytes(top.PORT(i, payload), beat.bytes, sizeof beat.bytes);
        offering = true;
    }

    Status tick() {
        Status status = OUT_OF_CYCLES;
        offer();
        top.PORT(i, valid) = offering;
        top.PORT(o, ready) = chance(p_out);
        top.PORT(o_request, ready) = chance(p_out);
        top.clk = 0;
        top.eval();
        bool taken = offering && top.PORT(i, ready);
        if (top.PORT(o, valid)) {
            Beat beat{};
            get_bytes(top.PORT(o, payload), beat.bytes, sizeof beat.bytes);
            if (waited && std::memcmp(beat.bytes, waiting.bytes, sizeof beat.bytes)) status = PROTOCOL;
            waited = !top.PORT(o, ready);
            waiting = beat;
            if (top.PORT(o, ready)) {
                receiving.insert(receiving.end(), beat.bytes, beat.bytes + LINK);
                if (beat.bytes[LINK] & 1) {
                    received.push_back(std::move(receiving));
                    receiving.clear();
                    status = RECEIVED;
                }
            }
        } else if (waited) {
            status = PROTOCOL;
        }
        if (top.PORT(o_request, valid) && top.PORT(o_request, ready)) {
            uint8_t bytes[12]{};
            get_bytes(top.PORT(o_request, payload), bytes, 10);
            uint64_t offset = 0, length = 0;
            std::memcpy(&offset, bytes, 6);
            std::memcpy(&length, bytes + 6, 4);
            requests.push_back(offset);
            requests.push_back(length);
            answers_due.push_back(cycle + latency);
            if (status == OUT_OF_CYCLES) status = REQUEST;
        }
        top.clk = 1;
        top.eval();
        cycle++;
        if (taken) {
            offering = false;
            sent += LINK;
            next_beat_256 = std::max(next_beat_256, (cycle - 1) * 256) + cycles_per_256_beats;
            if (sent >= sending.front().bytes.size()) {
                sending.pop_front();
                sent = 0;
            }
        }
        return status;
    }
};

}  // namespace

extern "C" {

Sim *sim_new() {
    Sim *sim = new Sim;
    sim->top.rst = 1;
    for (int edge = 0; edge < 4; edge++) {
        sim->top.clk = edge & 1;
        sim->top.eval();
    }
    sim->top.rst = 0;
    return sim;
}

void sim_free(Sim *sim) {
    sim->top.final();
    delete sim;
}

void sim_feed(Sim *sim, uint64_t latency, uint64_t cycles_per_256_beats, uint32_t p_in, uint32_t p_out, uint64_t seed) {
    sim->latency = latency;
    sim->cycles_per_256_beats = cycles_per_256_beats;
    sim->p_in = p_in;
    sim->p_out = p_out;
    sim->random_state = seed | 1;
}

// Append a message to what is sent; `answer`: not before the oldest unanswered request's time.
void sim_send(Sim *sim, const uint8_t *header, size_t header_bytes, const uint8_t *data, size_t bytes, int answer) {
    Message message{{}, 0};
    message.bytes.reserve(header_bytes + bytes);
    message.bytes.insert(message.bytes.end(), header, header + header_bytes);
    message.bytes.insert(message.bytes.end(), data, data + bytes);
    if (answer && !sim->answers_due.empty()) {
        message.ready_at = sim->answers_due.front();
        sim->answers_due.pop_front();
    }
    sim->sending.push_back(std::move(message));
}

// Run until something happens or so many cycles have passed.
int sim_run(Sim *sim, uint64_t cycles) {
    while (cycles--) {
        Status status = sim->tick();
        if (status != OUT_OF_CYCLES) return status;
    }
    return OUT_OF_CYCLES;
}

uint64_t sim_cycle(const Sim *sim) { return sim->cycle; }

int sim_next_request(Sim *sim, uint64_t *offset, uint64_t *length) {
    if (sim->requests_given == sim->requests.size()) return 0;
    *offset = sim->requests[sim->requests_given++];
    *length = sim->requests[sim->requests_given++];
    return 1;
}

// Bytes of the oldest message received, 0 if there is none; copied into `bytes` and dropped if `bytes` is not null.
size_t sim_next_message(Sim *sim, uint8_t *bytes) {
    if (sim->received.empty()) return 0;
    size_t size = sim->received.front().size();
    if (bytes) {
        std::memcpy(bytes, sim->received.front().data(), size);
        sim->received.pop_front();
    }
    return size;
}

// Requests that came so far are never answered.
void sim_forget_requests(Sim *sim) {
    sim->requests_given = sim->requests.size();
    sim->answers_due.clear();
}
}
