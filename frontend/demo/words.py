"""The words that the demo's handbooks are made of: names, towns, goods, places and kinds of value.

Each word becomes one token of the demo model's tokenizer, so a name costs the model two tokens and
not eight. The lists have no word twice.
"""

from __future__ import annotations


def _words(text: str) -> tuple[str, ...]:
    return tuple(text.split())


GIVEN_NAMES = _words("""
Ada Agnes Alma Amos Anders Anneke Arlo Astrid Basil Beatrix Benno Bertil Bianca Boris Bruno Camille
Carla Casper Cecil Celia Clara Clement Conrad Cora Cyrus Dagny Dario Delia Dorian Edda Edgar Elias
Elin Elsa Emil Enzo Erik Esme Ezra Fabian Felix Fiona Flora Freya Gavin Gideon Gilda Greta Gustav
Hanna Harald Hazel Hector Helga Hilda Hugo Ida Ilse Imogen Ines Ingrid Irma Isolde Ivan Jasper Joan
Jonas Julius Karin Kaspar Keiko Klara Lars Leif Lena Leon Levi Linus Lorna Lucian Lydia Magnus Maja
Mara Marius Matilda Milo Mira Moritz Nadia Nell Nils Nora Odette Olaf Oscar Otto Paula Petra Quinn
Ramona Rasmus Rhea Roland Rosalind Rufus Sabine Selma Silas Sonja Stella Sven Tamara Thea Tomas Ulla
Vera Viktor Wanda Yara Zelda
""")

FAMILY_NAMES = _words("""
Abbott Adler Alder Ames Archer Atwood Bachman Baird Barlow Becker Bellamy Bergen Blake Bloom Bowen
Brandt Brook Bryce Burke Byrne Calder Carver Chase Clay Cobb Colby Conway Cooper Corbett Crane
Cullen Curtis Dahl Dalton Darby Decker Dorsey Draper Drew Duncan Eaton Eklund Ellison Emery Engel
Everett Falk Farrow Fenn Finch Fischer Fletcher Foley Forsyth Foster Frost Gale Garner Gentry Gibbs
Glover Granger Greer Hale Hanley Harlan Hart Hayes Heller Hobbs Holm Holt Hooper Howell Hurst Irving
Jarvis Jensen Kane Keller Kemp Kendall Kerr Knox Kramer Lang Larkin Lennox Linden Locke Lowell
Lund Mallory Marsh Mercer Merrill Moss Munro Nash Newell Norris Novak Oakes Orwell Osborne Parrish
Pearce Penrose Pike Porter Pryor Quayle Rand Reeve Ridley Rivers Rowe Ryder Sawyer Sexton Shaw Sloan
Sparrow Stark Steele Sutton Swift Tate Thorne Tully Turner Underhill Vance Vaughn Voss Wade Walsh
Warner Watts Webb Weller Whitlock Wilder Winslow Wolfe Wyatt Yates York Zimmer
""")

CITIES = _words("""
Aldwick Ambry Arden Ashby Barrow Belmont Birkdale Bramley Brenton Calloway Camden Carrick Chelton
Claremont Corbridge Cotham Dalby Danbury Darnley Denholm Dorring Dunmore Easton Eldham Elmsford
Fairhaven Farley Fenwick Fordham Galway Garstang Glenrock Grafton Halden Hampden Harwick Hedley
Hillcrest Holbrook Ilford Ironbridge Ivybridge Jarrow Kelham Kendrick Kilburn Kingsley Lambton
Langford Larne Ledbury Linfield Lorton Marlow Maybury Melrose Milford Morland Nairn Nesbit Newhaven
Norwick Oakham Olney Ormond Paxton Penfield Pickering Quorn Radley Ramsey Redcar Renwick Rockport
Rosedale Rothbury Sandwell Selby Sherborne Skelton Stanhope Stockwell Tarrant Thornbury Tilbury
Trenholm Ulverton Upwell Ventry Wakefield Walden Warwick Westbrook Whitby Winfield Wooler Yarrow
""")

ADJECTIVES = _words("""
Alpine Amber Antique Arctic Autumn Bright Bronze Canvas Cedar Chalk Classic Clever Cloudy Compact
Coral Cosmic Copper Crisp Crystal Dapper Desert Double Dusty Eager Elegant Ember Feather Festive
Folding Forest Gentle Giant Gilded Glass Golden Granite Hollow Humble Ivory Jolly Kindly Lively
Lucky Marble Mellow Midnight Mighty Misty Nimble Noble Northern Oaken Ocean Pocket Polished Quiet
Rapid Rustic Sable Sandy Silent Silken Simple Solar Southern Spare Sturdy Sunny Timber Travel Velvet
Vivid Wicker Winter Woven
""")

GOODS = _words("""
Anchor Anvil Apron Armchair Basket Beacon Bench Blanket Bottle Bowl Bucket Cabinet Candle Carpet
Chisel Clock Compass Cradle Cupboard Drum Easel Fiddle Flask Flute Hammer Hammock Harp Helmet Kettle
Ladder Lantern Lens Locket Mirror Needle Oven Paddle Pillow Pitcher Plough Quilt Rake Rope Saddle
Satchel Shovel Sled Spade Spindle Stool Stove Table Teapot Telescope Tent Trumpet Trunk Vase Wagon
Whistle
""")

PLACE_WORDS = _words("""
Acorn Badger Bilberry Bluebell Bramble Buttercup Chestnut Clover Cormorant Cricket Curlew Daisy
Dragonfly Elder Falcon Fern Foxglove Goldfinch Gorse Hawthorn Heather Heron Hornbeam Jackdaw Juniper
Kestrel Kingfisher Lapwing Larch Lavender Lilac Magpie Maple Marigold Mulberry Nettle Nightingale
Orchard Osprey Otter Partridge Peony Pheasant Plover Poplar Primrose Raven Rowan Salmon Sorrel
Squirrel Starling Swallow Sycamore Thistle Thrush Violet Walnut Willow Wren
""")

PLACE_KINDS = _words("""
Annex Arcade Barn Bridge Chapel Cottage Court Depot Gallery Garden Hall House Inn Library Lodge Mill
Museum Pavilion Square Theatre Tower Yard
""")

STREET_WORDS = _words("""
Abbey Baker Castle Church College Dock Ferry Forge Harbour Hill Kiln Lake Manor Meadow Minster
Market Old Park Priory Quarry Queen River School Shepherd Smith Spring Station Stone Sun Tanner
Temple Town Upper Valley Victoria Water Weaver Well West Wharf
""")

STREET_KINDS = _words("Avenue Lane Road Row Street Way")

TEAMS = _words("""
accounts archives catering design finance gardening harvest kitchen logistics music packing planning
post printing repairs research safety sales security stores transport training
""")

COLOURS = _words("""
beige black blue brown crimson cream green grey indigo maroon olive orange pink purple red scarlet
silver teal turquoise white yellow
""")

DAYS = _words("Monday Tuesday Wednesday Thursday Friday Saturday Sunday")

CODE_PREFIXES = _words("""
AX BD BK BR CF CQ CV DK DM DZ EJ FG FL FX GB GN GT HC HJ HW JB JQ JT KD KL KZ LB LF LR MG MK MV NB
NK NX PD PK PZ QD QF QX RB RK RZ SD SK SV TB TG TZ VB VK VX WD WK WZ XB XK ZD ZK
""")
