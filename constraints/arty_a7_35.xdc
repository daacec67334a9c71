# What boards/arty_a7.py cannot say. Pins and the 100 MHz clock come from the platform class.

# The host's bits come at any time, into a synchroniser of two registers (hw/link/uart.py).
set_false_path -from [get_ports {uart_0__rx__io}]
# The bridge samples by its own clock; a bit is at least eight of ours long.
set_false_path -to [get_ports {uart_0__tx__io}]
# The flash is wired with four data lines.
set_property BITSTREAM.CONFIG.SPI_BUSWIDTH 4 [current_design]
# A smaller file configures faster.
set_property BITSTREAM.GENERAL.COMPRESS TRUE [current_design]
