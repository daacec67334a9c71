// A Verilated device behind a C interface: bytes in, bytes out, a clock cycle without Python. See sim/device_sim.py.
//
// BIT_CLOCKS > 0: two wires, so many clocks a bit. Otherwise AXI-Stream of LINK_BYTES, both clocks being one.
// MEMORY: a board's memory behind AXI4, which answers a burst MEMORY_LATENCY cycles after it was asked for.

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <deque>
#include <unordered_map>
#include <vector>

#include "Vdevice.h"
#include "verilated.h"

namespace {

enum Status { OUT_OF_CYCLES = 0, OUTPUT = 1, PROTOCOL = 3 };

#if MEMORY
constexpr uint64_t MEMORY_LATENCY = 30;

// Reads in order, a beat a cycle; writes confirmed when their last beat has come.
struct Memory {
    struct Burst {
        uint64_t word, beats, ready_at;
    };
    std::unordered_map<uint64_t, std::vector<uint8_t>> pages;  // of 4 KiB
    std::deque<Burst> reads;
    Burst write{};
    bool writing = false, confirming = false;

    uint8_t *at(uint64_t word) {
        std::vector<uint8_t> &page = pages[word >> 8];
        page.resize(4096);
        return page.data() + 16 * (word & 255);
    }

    void drive(Vdevice &top, uint64_t cycle) {
        top.m_axi_arready = reads.size() < 16;
        top.m_axi_rvalid = !reads.empty() && cycle >= reads.front().ready_at;
        if (top.m_axi_rvalid) {
            std::memcpy(&top.m_axi_rdata, at(reads.front().word), 16);
            top.m_axi_rlast = reads.front().beats == 1;
        }
        top.m_axi_awready = !writing && !confirming;
        top.m_axi_wready = writing;
        top.m_axi_bvalid = confirming;
    }

    void clock(const Vdevice &top, uint64_t cycle) {
        if (top.m_axi_rvalid && top.m_axi_rready) {
            reads.front().word++;
            if (!--reads.front().beats) reads.pop_front();
        }
        if (top.m_axi_arvalid && top.m_axi_arready)
            reads.push_back({uint64_t(top.m_axi_araddr) >> 4, uint64_t(top.m_axi_arlen) + 1, cycle + MEMORY_LATENCY});
        if (top.m_axi_bvalid && top.m_axi_bready) confirming = false;
        if (top.m_axi_wvalid && top.m_axi_wready) {
            std::memcpy(at(write.word++), &top.m_axi_wdata, 16);
            if (top.m_axi_wlast) {
                writing = false;
                confirming = true;
            }
        }
        if (top.m_axi_awvalid && top.m_axi_awready) {
            write.word = uint64_t(top.m_axi_awaddr) >> 4;
            writing = true;
        }
    }
};
#endif

struct Sim {
    VerilatedContext context;
    Vdevice top{&context};
    uint64_t cycle = 0;
    uint32_t p_in = UINT32_MAX, p_out = UINT32_MAX;
    uint64_t random_state = 1;
    std::deque<std::vector<uint8_t>> sending;
    size_t sent = 0;  // bytes of the first
    std::vector<uint8_t> received;
#if MEMORY
    Memory memory;
    void memory_drive() { memory.drive(top, cycle); }
    void memory_clock() { memory.clock(top, cycle); }
#else
    void memory_drive() {}
    void memory_clock() {}
#endif

    bool chance(uint32_t p) {
        if (p == UINT32_MAX) return true;
        random_state ^= random_state << 13;
        random_state ^= random_state >> 7;
        random_state ^= random_state << 17;
        return static_cast<uint32_t>(random_state >> 32) < p;
    }

    void advance(size_t bytes) {
        sent += bytes;
        if (sent == sending.front().size()) {
            sending.pop_front();
            sent = 0;
        }
    }

#if BIT_CLOCKS
    int out_left = 0, out_bits = 0;  // clocks of the present bit, bits of the present byte
    uint32_t out_byte = 0;
    int in_left = -1, in_bits = 0;  // clocks to the next sample; -1: no byte is coming
    uint32_t in_byte = 0;

    void drive() {
        if (out_left == 0 && out_bits == 0 && !sending.empty() && chance(p_in)) {
            out_byte = sending.front()[sent] << 1 | 1 << 9;
            advance(1);
            out_bits = 10;
        }
        if (out_left == 0 && out_bits) {
            top.rx = out_byte & 1;
            out_byte >>= 1;
            out_bits--;
            out_left = BIT_CLOCKS;
        }
        if (out_left) out_left--;
    }

    Status sample() {
        if (in_left < 0) {
            if (!top.tx) {
                in_left = BIT_CLOCKS + BIT_CLOCKS / 2;
                in_bits = 0;
                in_byte = 0;
            }
            return OUT_OF_CYCLES;
        }
        if (--in_left) return OUT_OF_CYCLES;
        in_byte |= top.tx << in_bits++;
        in_left = BIT_CLOCKS;
        if (in_bits < 9) return OUT_OF_CYCLES;
        in_left = -1;
        if (!(in_byte >> 8)) return PROTOCOL;
        received.push_back(in_byte);
        return received.size() % 16 ? OUT_OF_CYCLES : OUTPUT;
    }

    Status tick() {
        drive();
        memory_drive();
        clocks(0);
        top.eval();
        memory_clock();
        clocks(1);
        top.eval();
        cycle++;
        return sample();
    }

    void start() { top.rx = 1; }
#else
    bool offering = false;
    size_t offered = 0;
    bool waited = false;
    uint8_t waiting[LINK_BYTES + 1];

    void offer() {
        if (offering || sending.empty() || !chance(p_in)) return;
        const std::vector<uint8_t> &transfer = sending.front();
        offered = std::min<size_t>(LINK_BYTES, transfer.size() - sent);
        uint8_t beat[LINK_BYTES]{};
        std::memcpy(beat, transfer.data() + sent, offered);
        std::memcpy(&top.s_axis_tdata, beat, LINK_BYTES);
        top.s_axis_tkeep = (1u << offered) - 1;
        top.s_axis_tlast = sent + offered == transfer.size();
        offering = true;
    }

    Status tick() {
        Status status = OUT_OF_CYCLES;
        offer();
        top.s_axis_tvalid = offering;
        top.m_axis_tready = chance(p_out);
        memory_drive();
        clocks(0);
        top.eval();
        memory_clock();
        bool taken = offering && top.s_axis_tready;
        if (top.m_axis_tvalid) {
            uint8_t beat[LINK_BYTES + 1];
            std::memcpy(beat, &top.m_axis_tdata, LINK_BYTES);
            beat[LINK_BYTES] = top.m_axis_tlast;
            if (waited && std::memcmp(beat, waiting, sizeof beat)) status = PROTOCOL;
            waited = !top.m_axis_tready;
            std::memcpy(waiting, beat, sizeof beat);
            if (top.m_axis_tready) {
                received.insert(received.end(), beat, beat + LINK_BYTES);
                if (top.m_axis_tlast) status = OUTPUT;
            }
        } else if (waited) {
            status = PROTOCOL;
        }
        clocks(1);
        top.eval();
        cycle++;
        if (taken) {
            offering = false;
            advance(offered);
        }
        return status;
    }

    void start() {}
#endif
    void clocks(int level) { top.clk = top.link_clk = level; }
    void reset(int level) { top.rst = top.link_rst = level; }
};

}  // namespace

extern "C" {

Sim *sim_new() {
    Sim *sim = new Sim;
    sim->start();
    sim->reset(1);
    for (int edge = 0; edge < 16; edge++) {
        sim->clocks(edge & 1);
        sim->top.eval();
    }
    sim->reset(0);
    return sim;
}

void sim_free(Sim *sim) {
    sim->top.final();
    delete sim;
}

void sim_stalls(Sim *sim, uint32_t p_in, uint32_t p_out, uint64_t seed) {
    sim->p_in = p_in;
    sim->p_out = p_out;
    sim->random_state = seed | 1;
}

// Append one transfer to what is sent.
void sim_write(Sim *sim, const uint8_t *data, size_t bytes) {
    if (bytes) sim->sending.emplace_back(data, data + bytes);
}

// Bytes that have not yet entered the device.
size_t sim_unsent(const Sim *sim) {
    size_t bytes = 0;
    for (const auto &transfer : sim->sending) bytes += transfer.size();
    return bytes - sim->sent;
}

// Run until a frame (AXI-Stream) or sixteen bytes (wires) have come or so many cycles have passed.
int sim_run(Sim *sim, uint64_t cycles) {
    while (cycles--) {
        Status status = sim->tick();
        if (status != OUT_OF_CYCLES) return status;
    }
    return OUT_OF_CYCLES;
}

// Run so many cycles, whatever comes.
int sim_spin(Sim *sim, uint64_t cycles) {
    while (cycles--) {
        if (sim->tick() == PROTOCOL) return PROTOCOL;
    }
    return OUT_OF_CYCLES;
}

uint64_t sim_cycle(const Sim *sim) { return sim->cycle; }

// Bytes that came and were not read; copied into `bytes` and dropped if it is not null.
size_t sim_read(Sim *sim, uint8_t *bytes) {
    size_t size = sim->received.size();
    if (bytes) {
        std::memcpy(bytes, sim->received.data(), size);
        sim->received.clear();
    }
    return size;
}
}
