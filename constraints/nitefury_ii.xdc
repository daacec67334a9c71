# What no platform class says of the NiteFury-II and the Acorn CLE-215+. The memory's pins come with the controller.

# The slot's reference clock, 100 MHz by the PCI Express card specification; an MGT pin has no I/O standard.
set_property PACKAGE_PIN F6 [get_ports pcie_refclk_clk_p*]
# Its other half.
set_property PACKAGE_PIN E6 [get_ports pcie_refclk_clk_n*]
# Vivado cannot know its frequency.
create_clock -name pcie_refclk -period 10.000 [get_ports pcie_refclk_clk_p*]
# PERST#, an input of an endpoint, on a bank at 3.3 V.
set_property -dict {PACKAGE_PIN J1 IOSTANDARD LVCMOS33 PULLUP TRUE} [get_ports pcie_perst_n]
# PERST# has no relation to any clock; the bridge synchronises it.
set_false_path -from [get_ports pcie_perst_n]
# CLKREQ#, held low: the reference clock is always wanted.
set_property -dict {PACKAGE_PIN G1 IOSTANDARD LVCMOS33} [get_ports pcie_clkreq_n*]
# It never changes.
set_false_path -to [get_ports pcie_clkreq_n*]
# The board's oscillator, for the memory controller and our PLL, on a bank at 1.5 V.
set_property -dict {PACKAGE_PIN J19 IOSTANDARD DIFF_SSTL15} [get_ports clk200_clk_p*]
# Its other half.
set_property -dict {PACKAGE_PIN H19 IOSTANDARD DIFF_SSTL15} [get_ports clk200_clk_n*]
# It is buffered outside the memory controller, whose own constraint would be at its pin.
create_clock -name clk200 -period 5.000 [get_ports clk200_clk_p*]

# The card wires its lanes in another order than the bridge's default: lane 0 is the transceiver at B10,
set_property LOC GTPE2_CHANNEL_X0Y6 [get_cells {Top_i/xdma_0/inst/Top_xdma_0_0_pcie2_to_pcie3_wrapper_i/pcie2_ip_i/inst/inst/gt_top_i/pipe_wrapper_i/pipe_lane[0].gt_wrapper_i/gtp_channel.gtpe2_channel_i}]
# lane 1 the one at B8,
set_property LOC GTPE2_CHANNEL_X0Y4 [get_cells {Top_i/xdma_0/inst/Top_xdma_0_0_pcie2_to_pcie3_wrapper_i/pcie2_ip_i/inst/inst/gt_top_i/pipe_wrapper_i/pipe_lane[1].gt_wrapper_i/gtp_channel.gtpe2_channel_i}]
# lane 2 the one at D11,
set_property LOC GTPE2_CHANNEL_X0Y5 [get_cells {Top_i/xdma_0/inst/Top_xdma_0_0_pcie2_to_pcie3_wrapper_i/pcie2_ip_i/inst/inst/gt_top_i/pipe_wrapper_i/pipe_lane[2].gt_wrapper_i/gtp_channel.gtpe2_channel_i}]
# and lane 3 the one at D9.
set_property LOC GTPE2_CHANNEL_X0Y7 [get_cells {Top_i/xdma_0/inst/Top_xdma_0_0_pcie2_to_pcie3_wrapper_i/pcie2_ip_i/inst/inst/gt_top_i/pipe_wrapper_i/pipe_lane[3].gt_wrapper_i/gtp_channel.gtpe2_channel_i}]

# Bits of a Gray-coded pointer (hw/link/crossing.py) must come within one clock of each other, so a crossing may take no
# longer than the shorter period, 8 ns of the bridge's 125 MHz; a false path would leave the skew open.
set_max_delay -datapath_only 8.000 -from [get_clocks -of_objects [get_pins Top_i/device/axi_aclk]] -to [get_clocks -of_objects [get_pins Top_i/device/clk]]
# The same the other way.
set_max_delay -datapath_only 8.000 -from [get_clocks -of_objects [get_pins Top_i/device/clk]] -to [get_clocks -of_objects [get_pins Top_i/device/axi_aclk]]
# Asynchronous sets belong to reset synchronisers only, which release them by their own clock.
set_false_path -to [get_pins -hierarchical -filter {NAME =~ Top_i/device/* && REF_PIN_NAME == PRE}]

# The flash is wired with four data lines.
set_property BITSTREAM.CONFIG.SPI_BUSWIDTH 4 [current_design]
# The slot waits 100 ms for a card: a compressed file at a faster clock configures in time.
set_property BITSTREAM.GENERAL.COMPRESS TRUE [current_design]
# See above.
set_property BITSTREAM.CONFIG.CONFIGRATE 16 [current_design]
# The configuration bank is at 3.3 V.
set_property CFGBVS VCCO [current_design]
# See above.
set_property CONFIG_VOLTAGE 3.3 [current_design]
